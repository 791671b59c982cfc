"""kvir: a compiler and runtime for KV-cache policies.  Importing this package stays cheap."""

__version__ = "0.1.0"
