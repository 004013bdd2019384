"""The definitions of acceptance, and the measurements built on them.

The measurements are forecast, engine, serving, parity and report.
"""
