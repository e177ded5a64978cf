"""What a quantized tensor is, and how models lie on disk."""
