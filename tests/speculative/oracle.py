"""A proposer that knows the replies, and drafts as many right tokens of them as it is told, then a wrong one."""

from array import array

from zse.speculative.speculator import may_draft, without_ends


class Oracle:
    """replies: prompt → the tokens that follow it. right(rng): how many drafts are right; then one is wrong. count:
    drafts of a request in a step."""

    waits = False  # every other step is not given ahead, so that both orders happen

    def __init__(self, replies: dict[tuple[int, ...], list[int]], count: int, right, vocab: int):
        self.replies, self.count, self.right, self.vocab = replies, count, right, vocab

    def propose(self, scheduler) -> None:
        for request in scheduler.decoding():
            if may_draft(request):
                request.drafts = without_ends(request, array("i", self.drafts(request)), scheduler.eos_ids)

    def drafts(self, request) -> array:
        prompt, said = tuple(request.tokens[: request.prompt_len]), len(request.tokens) - request.prompt_len
        drafts = array("i", self.replies[prompt][said : said + self.count])
        right = self.right()
        if right < len(drafts):
            drafts[right] = (drafts[right] + 1) % self.vocab
        return drafts

    def observe(self, batch, scheduler, seconds) -> None:
        self.waits = not self.waits

    def close(self) -> None:
        pass

    def counters(self, totals) -> dict:
        return {}
