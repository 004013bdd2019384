"""The definitions of acceptance, and the measurements built on them.

Forecast, engine, serving, parity, report.
"""
