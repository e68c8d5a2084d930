"""What kept pages depend on beside their tokens: of engines that share files, or send each other pages, the same."""

import hashlib

from zse import __version__

# A model's revision is read from so many pieces of so many bytes of each file.
PIECES, PIECE_BYTES = 65, 4096


def fingerprint_of(engine, config, source, quantize: str | None) -> bytes:
    """What the content of pages depends on beside their tokens: 16 bytes, of two engines the same where the pages are. Of several ranks
    each has its own."""
    share = engine.runner.model.share
    facts = (
        __version__,
        config.page_size,
        engine.runner.pages.page_nbytes,
        config.kv_dtype,
        config.activations,
        quantize,
        engine.runner.device.kernels,
        *(() if engine.runner.states is None else (engine.runner.states.slot_nbytes,)),
        *(("pages of its own",) if config.page_pools > 1 else ()),
        *(() if share is None else (share.rank, share.size, share.is_stage, getattr(share, "spans", None))),
    )
    return hashlib.blake2b(revision_of(source) + repr(facts).encode(), digest_size=16).digest()


def revision_of(source) -> bytes:
    """A digest by which the model's files are told from others: of their sizes, their beginnings (metadata and table of
    tensors) and pieces all over them. Reading a model in full would take longer than loading it."""
    total = hashlib.blake2b(digest_size=32)
    for file in source.files:
        total.update(file.size.to_bytes(8, "little"))
        piece = min(PIECE_BYTES, file.size)
        for number in range(PIECES):
            total.update(file.read((file.size - piece) * number // (PIECES - 1), piece))
    return total.digest()
