"""Telemetry for operators: metrics, traces, logs and decision logs."""
