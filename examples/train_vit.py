"""A small vision transformer from scratch: `python -m examples.train_vit --images DIRECTORY`.

The images are CIFAR-10's, as train_jpg.npz and test_jpg.npz. After an interruption the same command resumes.
"""

import argparse
import math
from pathlib import Path

from flexrank.errors import FlexrankError
from research.runner import WORK
from research.studies import vision
from research.studies.cifar import Recipe, train_vit


def main() -> None:
    """Trains the network that `python -m research vision` compresses, and prints its accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="a directory of train_jpg.npz and test_jpg.npz")
    place = "a directory for the model; %(default)s by default, where `python -m research vision` looks for it"
    parser.add_argument("--output", type=Path, default=WORK / vision.VIT_DIRECTORY, help=place)
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--batch-size", type=int, default=Recipe.batch_size)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    options = parser.parse_args()
    for name in ("epochs", "batch_size", "learning_rate"):
        if not 0 < (value := getattr(options, name)) < math.inf:
            parser.exit(2, f"error: --{name.replace('_', '-')} is {value:g}; it is a number above 0\n")
    recipe = Recipe(
        epochs=options.epochs, learning_rate=options.learning_rate, batch_size=options.batch_size, seed=options.seed
    )
    try:
        record = train_vit(options.images, options.output, recipe)
    except FlexrankError as error:
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")
    print(f"{record['accuracy']:.2%} of the test images are classified right")


if __name__ == "__main__":
    main()
