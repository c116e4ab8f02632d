"""Prediction of clicks."""
