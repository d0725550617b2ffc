"""flexrank."""
