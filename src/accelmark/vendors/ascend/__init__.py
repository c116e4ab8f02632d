"""Huawei Ascend NPUs."""
