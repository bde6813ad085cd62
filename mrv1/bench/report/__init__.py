"""The report: tables and pictures of the results files, and a README's excerpt of them."""

from mrv1.bench.report.page import Report, make_report

__all__ = ["Report", "make_report"]
