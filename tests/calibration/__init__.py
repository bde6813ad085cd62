"""Tests of calibration: models under policies, losses, prompts."""
