"""What `zse run --stats` prints: times since exec, speed, memory."""

from zse.bench.process import peak_memory_bytes


def text(llm, first: float, last: float, num_tokens: int) -> str:
    """first, last: seconds since exec at the first and last token. llm.phases_ms: name → milliseconds since exec."""
    lines = [("tokens", str(num_tokens))]
    if num_tokens:
        lines.append(("exec to first token", f"{1000 * first:.0f} ms"))
    if num_tokens > 1 and last > first:
        lines.append(("decode", f"{(num_tokens - 1) / (last - first):.1f} tok/s"))
    lines.append(("peak memory", f"{peak_memory_bytes() / 2**20:.0f} MiB"))
    lines += [(f"  {name}", f"{ms:.0f} ms") for name, ms in llm.phases_ms.items()]
    return "".join(f"{name:<32}{value}\n" for name, value in lines)
