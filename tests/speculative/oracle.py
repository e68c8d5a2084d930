"""A proposer that knows the replies, and drafts as many right tokens of them as it is told, then a wrong one."""

from array import array

from zse.scheduler.feature import Feature
from zse.speculative.speculator import without_ends


class Oracle(Feature):
    """replies: prompt → the tokens that follow it. right(rng): how many drafts are right; then one is wrong. count:
    drafts of a request in a step."""

    def __init__(self, scheduler, replies: dict[tuple[int, ...], list[int]], count: int, right, vocab: int):
        self.scheduler, self.replies, self.count, self.right, self.vocab = scheduler, replies, count, right, vocab

    def before_schedule(self, now) -> list:
        for request in self.scheduler.decoding():
            request.drafts = without_ends(request, array("i", self.drafts(request)), self.scheduler.eos_ids)
        return []

    def drafts(self, request) -> array:
        prompt, said = tuple(request.tokens[: request.prompt_len]), len(request.tokens) - request.prompt_len
        drafts = array("i", self.replies[prompt][said : said + self.count])
        right = self.right()
        if right < len(drafts):
            drafts[right] = (drafts[right] + 1) % self.vocab
        return drafts

    def after_commit(self, batch, seconds) -> None:
        self.reads_tokens = not self.reads_tokens  # every other step is not given ahead, so that both orders happen
