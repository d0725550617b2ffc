"""A causal language model of every size: `python examples/language_model.py MODEL TEXT`.

MODEL is a directory or a hub name. TEXT is a UTF-8 file, or a folder of them, in the language that the model speaks: at
least five texts, and enough tokens for eleven batches of 16 blocks besides the fifth that is held out.
"""

import argparse

import flexrank as fr
from flexrank.data import metrics
from flexrank.data import text as data
from flexrank.hf.models import hidden_states, load_model, load_tokenizer


def main() -> None:
    """Prints held-out nats per token at each size and text by the half-size model, and exports that model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--separator", default="\n\n", help="what divides TEXT into texts")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--length", type=int, default=128, help="tokens per block")
    options = parser.parse_args()

    teacher, model = load_model(options.model, "language"), load_model(options.model, "language")
    tokenizer = load_tokenizer(options.model)
    texts = data.read_texts(options.text, options.separator)
    count = len(texts) // 5 * 4
    if not count:
        parser.error(f"TEXT holds {len(texts)} texts divided by {options.separator!r}; at least 5 are needed")
    blocks = data.token_blocks(tokenizer, texts[:count], options.length, batch_size=16)
    held_out = data.token_blocks(tokenizer, texts[count:], options.length, batch_size=16)[:8]
    if len(blocks) < 11:
        parser.error(f"TEXT fills {len(blocks)} batches of 16 blocks for training; at least 11 are needed")

    objective, layers = fr.LogitObjective(), fr.select_layers(model, exclude=["lm_head"])
    fr.decompose_(model, fr.collect_moments(model, blocks[:8], layers, gradient_loss=objective.fisher_loss))
    evaluate = fr.distillation_evaluator(teacher, blocks[8:10], objective)
    chain = fr.allocate_ranks(fr.probe_sensitivity(model, evaluate, num_levels=6), budgets=[0.8, 0.6, 0.5, 0.4])
    with hidden_states(model, teacher):
        fr.distill_(
            model, teacher, blocks[10:], chain, objective=fr.LogitObjective(hidden_weight=4.0), steps=options.steps,
            warmup_steps=10, learning_rate=options.learning_rate,
        )  # fmt: skip

    print(f"original: {metrics.nats_per_token(teacher, held_out):.3f} nats per token")
    for budget in reversed(chain.budgets):
        with fr.use_profile(model, chain.at(budget)):
            print(f"budget {budget}: {metrics.nats_per_token(model, held_out):.3f} nats per token")
    small = fr.deploy(model, chain.at(0.5))
    start = {name: values[:1, :16] for name, values in held_out[0].items()}
    print(tokenizer.decode(small.generate(**start, max_new_tokens=60, do_sample=False)[0]))
    fr.export(small, "runs/example/language-half", start, tokenizer=tokenizer)


if __name__ == "__main__":
    main()
