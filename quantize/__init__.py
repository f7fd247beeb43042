"""PairQuant: quantize a target and its EAGLE-3 draft with AMD Quark, and prove the result."""

__version__ = "0.1.0"
