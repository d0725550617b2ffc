"""Generates greedily by vLLM: reads a JSON object, prints another. It runs in vLLM's environment, without research."""

import json
import sys
import time


def main() -> None:
    """`{directory, prompts, new, repeats}` on standard input; the last line printed has the answer."""
    import vllm

    question = json.load(sys.stdin)
    length = len(question["prompts"][0]) + question["new"]
    model = vllm.LLM(
        question["directory"],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=length,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in question["prompts"]]
    options = vllm.SamplingParams(temperature=0, max_tokens=question["new"], ignore_eos=True, detokenize=False)
    seconds = []
    for _ in range(question["repeats"] + 1):  # the first one compiles
        start = time.perf_counter()
        outputs = model.generate(prompts, options, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print(json.dumps({"tokens": tokens, "seconds": seconds[1:], "version": vllm.__version__}))


if __name__ == "__main__":
    main()
