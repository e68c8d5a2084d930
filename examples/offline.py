"""The engine in your own process, no server: zse pull smollm2; python examples/offline.py [MODEL]"""

import sys

from zse import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
params = SamplingParams(max_tokens=24, temperature=0)

# Several prompts run as one batch.
for output in llm.generate(["The capital of France is", "One, two, three,"], params):
    print(repr(output.text), output.finish_reason)

# A conversation, a piece at a time.
for delta in llm.stream_chat([{"role": "user", "content": "Say hello."}], params):
    print(delta.text, end="", flush=True)
print()
llm.close()
