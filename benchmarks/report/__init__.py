"""The report: tables and pictures of the results files, and a README's excerpt of them."""

from benchmarks.report.page import Report, make_report

__all__ = ["Report", "make_report"]
