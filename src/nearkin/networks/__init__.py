"""Networks: a backbone gives features, a projector embeddings, a predictor predictions."""
