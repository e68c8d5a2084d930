"""What a request may ask of the scheduler and the cache, beside what it asks of the sampler (sampling/params.py)."""

import msgspec

from zse.structured.options import Structure


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """tenant: who pays: shares are counted, and cached prefixes kept apart, by it. priority: higher goes first.
    deadline_ms: from submission to the last token, None: none. cache_salt: keeps cached prefixes apart further.
    speculate: whether drafts may be verified for it (its tokens are the same). structure: the form of the answer,
    None: any."""

    tenant: str = ""
    priority: int = 0
    deadline_ms: float | None = None
    cache_salt: str = ""
    speculate: bool = True
    structure: Structure | None = None


DEFAULT = RequestOptions()
