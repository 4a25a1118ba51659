"""CATO: the SLA-aware control plane for self-hosted coding assistants."""

__version__ = "0.1.0"
