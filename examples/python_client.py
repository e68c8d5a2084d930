"""Talk to `zse serve` with the official OpenAI client (pip install openai): python examples/python_client.py [URL]"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="not-needed")
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three colours."}],
    max_tokens=40,
    temperature=0,
    stream=True,
)
for event in stream:
    if event.choices and event.choices[0].delta.content:
        print(event.choices[0].delta.content, end="", flush=True)
print()
