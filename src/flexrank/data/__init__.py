"""What a model is given and how well it does: batches, texts, images, metrics."""
