"""What a newcomer asks of the default model: how many answers end by themselves, and how many hold the word that they should.

    python benchmarks/first_answers.py [MODEL] [--seeds N] [--set FIELD=VALUE]…

Each question is asked with N seeds and the sampling that the model recommends, or the fields that --set names; an answer that has not
ended after --most tokens counts as endless: the questions want a sentence or two."""

import argparse
import json

from zse import LLM, SamplingParams

# A question, and what its answer has to hold; "": anything.
QUESTIONS = {
    "Name three colours.": "red",
    "What is the capital of France?": "Paris",
    "Hello! Who are you?": "",
    "Write a haiku about the sea.": "",
    "What is 2 plus 2?": "4",
    "List three fruits.": "apple",
    "Why is the sky blue?": "scatter",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "Give me a one-line greeting for a birthday card.": "birthday",
    "What do bees make?": "honey",
    "What is the largest planet?": "Jupiter",
    "Name a famous scientist.": "",
    "What does a baker do?": "bak",
    "Translate hello to Spanish.": "hola",
    "What color is grass?": "green",
    "Tell me a short joke.": "",
    "What is water made of?": "hydrogen",
    "How do I boil an egg?": "water",
    "Write a Python function that adds two numbers.": "def",
    "What is the opposite of hot?": "cold",
    "Give me three tips for sleeping well.": "sleep",
    "Who was the first president of the United States?": "Washington",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--most", type=int, default=600, help="tokens of an answer")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a sampling field")
    own = parser.parse_args()
    with LLM(own.model, prefix_cache=False) as llm:
        fields = llm.recommended | {name: json.loads(value) for name, value in (one.split("=", 1) for one in own.set)}
        print(f"{own.model}: {fields or 'OpenAI’s defaults'}, {own.seeds} seeds")
        ended = right = 0
        for question, word in QUESTIONS.items():
            params = [SamplingParams(seed=seed, max_tokens=own.most, **fields) for seed in range(own.seeds)]
            prompt = llm.encode_chat([{"role": "user", "content": question}])
            answers = llm.generate([prompt] * own.seeds, params)
            ends = sum(answer.finish_reason == "stop" for answer in answers)
            holds = sum(word.lower() in answer.text.lower() for answer in answers)
            lengths = sorted(len(answer.token_ids) for answer in answers)
            print(f"  {question:50} ended {ends:3}, {word!r} in {holds:3}, median {lengths[own.seeds // 2]} tokens")
            ended, right = ended + ends, right + holds
        total = own.seeds * len(QUESTIONS)
        print(f"of {total}: {ended} ended by themselves ({total - ended} endless), {right} held their word")


if __name__ == "__main__":
    main()
