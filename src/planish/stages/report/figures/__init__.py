"""Curves and charts of the report, drawn as SVG."""
