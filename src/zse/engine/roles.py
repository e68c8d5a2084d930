"""Which engines compute prompts for which (docs/design/0013-prefill-and-decode.md): what --role and its options open."""

from typing import Any

from zse.engine import fingerprints, prefill_client, prefill_server, wire
from zse.errors import ConfigError


def check_options(config: Any) -> None:
    """Raises ConfigError for addresses and a secret that are none, before anything is loaded."""
    wire.read_secret(config.kv_secret)
    for option, value in (("--kv-listen", config.kv_listen), *(("--kv-peers", peer) for peer in peers_of(config))):
        if value is not None:
            wire.address_of(value, option)


def peers_of(config: Any) -> list[str]:
    """The addresses of --kv-peers."""
    return [name.strip() for name in (config.kv_peers or "").split(",") if name.strip()]


def open_roles(engine: Any, config: Any, source: Any, quantize: str | None) -> None:
    """Have an Engine listen for others' prompts and ask others for its own, as a ResolvedConfig says. Raises
    ConfigError."""
    if engine.encoder is not None:
        raise ConfigError("--kv-listen and --kv-peers: this model is an encoder and has no KV pages")
    if not config.prefix_cache:
        raise ConfigError("--kv-listen and --kv-peers: pages of others are the prefix cache's, which is switched off")
    if engine.scheduler.cache.num_groups > 1:
        raise ConfigError("--kv-listen and --kv-peers: pages of this model's sliding windows are not sent")
    if engine.runner.model.config.has_state:
        raise ConfigError("--kv-listen and --kv-peers: the states of this model's layers are not sent")
    secret = wire.read_secret(config.kv_secret)
    fingerprint = fingerprints.fingerprint_of(engine, config, source, quantize)
    if config.kv_listen is not None:
        address = wire.address_of(config.kv_listen, "--kv-listen")
        server = prefill_server.PrefillServer(engine, address, fingerprint, secret, config.role == "prefill")
        engine.use("prefill server", server)
    if config.kv_peers is not None:
        client = prefill_client.PrefillClient(engine, peers_of(config), fingerprint, secret)
        engine.use("prefill client", client)
