"""Metrics, logs, traces and the dashboard's figures."""
