"""Which options of an EngineConfig go with several ranks, hosts or engines."""

from typing import Any

import msgspec

from zse.errors import ConfigError

NOT_OF_RANKS = "mmproj resident_layers expert_memory lazy_experts kv_listen kv_peers".split()
NOT_OF_STAGES = [*NOT_OF_RANKS, "tensor_parallel_size", "expert_parallel", "adapter_slots", "kv_layout"]
NOT_OF_OWN_PAGES = ["adapter_slots", "kv_layout"]


def num_ranks(config: Any) -> int:
    """How many processes compute the model."""
    return max(config.tensor_parallel_size, config.pipeline_parallel_size)


def page_pools(config: Any) -> int:
    """How many ranks have KV pages of their own."""
    return config.tensor_parallel_size if config.data_parallel_attention else 1


def check_ranks(config: Any) -> None:
    """ConfigError for what does not go with several ranks."""
    _check_nodes(config)
    if num_ranks(config) == 1:
        if config.expert_parallel:
            raise ConfigError("--expert-parallel divides experts among ranks: give --tensor-parallel-size N too")
        if config.data_parallel_attention:
            raise ConfigError(
                "--data-parallel-attention divides requests among ranks: give --tensor-parallel-size N too"
            )
        return
    is_pipeline = config.pipeline_parallel_size > 1
    option, refused = "--tensor-parallel-size", NOT_OF_RANKS
    if is_pipeline:
        option, refused = "--pipeline-parallel-size", [*NOT_OF_STAGES, "data_parallel_attention"]
    defaults = {field.name: field.default for field in msgspec.structs.fields(type(config))}
    for name in refused:
        if getattr(config, name) != defaults[name]:
            raise ConfigError(f"--{name.replace('_', '-')} is not possible with {option} {num_ranks(config)} yet")
    if config.data_parallel_attention:
        for name in NOT_OF_OWN_PAGES:
            if getattr(config, name) != defaults[name]:
                raise ConfigError(f"--{name.replace('_', '-')} is not possible with --data-parallel-attention yet")
    if is_pipeline and config.speculation in ("mtp", "eagle3"):
        raise ConfigError(f"--speculation {config.speculation} is not possible with {option} yet")
    if config.device.partition(":")[0] not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"{option} is for CPUs and NVIDIA GPUs, not for --device {config.device}")


def _check_nodes(config: Any) -> None:
    if config.nnodes == 1:
        if config.node_rank or config.rendezvous is not None or config.group_secret is not None:
            raise ConfigError("--node-rank, --rendezvous and --group-secret are of several hosts: give --nnodes N too")
        return
    size = num_ranks(config)
    if size % config.nnodes:
        raise ConfigError(
            f"--nnodes {config.nnodes}: {size} rank{'s' * (size > 1)} cannot be divided evenly: give a --tensor-parallel-size or "
            "--pipeline-parallel-size that is a multiple"
        )
    if config.node_rank >= config.nnodes:
        raise ConfigError(f"--node-rank {config.node_rank} of --nnodes {config.nnodes}: they are numbered from 0")
    for name in ("rendezvous", "group_secret"):
        if getattr(config, name) is None:
            what = {
                "rendezvous": "HOST:PORT, where node 0 listens",
                "group_secret": "a private file with the same random bytes on all",
            }
            raise ConfigError(f"--nnodes {config.nnodes} needs --{name.replace('_', '-')}: {what[name]}")


def check_role(config: Any) -> None:
    """ConfigError for a role without what it needs."""
    needs = {"prefill": "kv_listen", "decode": "kv_peers"}.get(config.role)
    if needs is not None and getattr(config, needs) is None:
        raise ConfigError(f"--role {config.role} needs --{needs.replace('_', '-')}")
    if (config.kv_listen or config.kv_peers) is not None and config.kv_secret is None:
        raise ConfigError(
            "--kv-listen and --kv-peers need --kv-secret: a private file with the same random bytes on both ends"
        )
