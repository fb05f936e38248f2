"""Calls into torch_npu that more than one rule makes, each behind the checks of its operator's contract."""
