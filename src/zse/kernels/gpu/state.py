"""What kernels of recurrent layers share: which runs and chunks a block has."""

from zse import kernel as zl


@zl.inline
def run_of(p, token):
    """The run of a token."""
    low, high = zl.i32(0), p.runs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if p.run_start[middle] <= token:
            low = middle + 0
        else:
            high = middle - 1
    return low


@zl.inline
def chunk_of(p, run, segment, TOKENS):
    """(first token, token behind the last) of the run's chunk that begins among the TOKENS tokens from `segment` on, the
    first not below the second where there is none. A run's chunks begin with it and have TOKENS tokens, but for the
    last."""
    first, end = p.run_start[run], p.run_start[run + 1]
    begin = first + (max(segment - first, 0) + (TOKENS - 1)) // TOKENS * TOKENS
    return begin, min(min(begin + TOKENS, end), end if begin < segment + TOKENS else begin)
