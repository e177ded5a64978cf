"""Methods: statistics and weights in, ``QuantizedTensor`` out; and the pipeline around them."""
