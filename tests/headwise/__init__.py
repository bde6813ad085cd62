"""Tests of head policies."""
