"""Triton kernels, one operation a file: contract, kernel, wrapper."""
