"""Generates greedily with vLLM, from one JSON file to another. Runs in vLLM's environment, without research."""

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Reads `{directory, prompts, new, repeats}` from the first file and writes the second; vLLM prints freely."""
    import vllm

    question = json.loads(Path(sys.argv[1]).read_text())
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
    for _ in range(question["repeats"] + 1):  # the first call compiles
        start = time.perf_counter()
        outputs = model.generate(prompts, options, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    answer = {"tokens": tokens, "seconds": seconds[1:], "version": vllm.__version__}
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
