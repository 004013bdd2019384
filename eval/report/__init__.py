"""Reports: pages, charts, tables, model cards."""
