"""What `zse run --stats` prints: times since exec, speed, memory."""

from zse.bench.process import peak_memory_bytes, since_exec_ms


def text(llm, first: float, last: float, num_tokens: int) -> str:
    """first, last: perf_counter at the first and last token. llm.phases_ms: name → milliseconds since exec."""
    lines = [("tokens", str(num_tokens))]
    if num_tokens and (ttft := since_exec_ms(first)) is not None:
        lines.append(("exec to first token", f"{ttft:.0f} ms"))
    if num_tokens > 1 and last > first:
        lines.append(("decode", f"{(num_tokens - 1) / (last - first):.1f} tok/s"))
    lines.append(("peak memory", f"{peak_memory_bytes() / 2**20:.0f} MiB"))
    lines += [(f"  {name}", f"{ms:.0f} ms") for name, ms in llm.phases_ms.items()]
    return "".join(f"{name:<24}{value}\n" for name, value in lines)
