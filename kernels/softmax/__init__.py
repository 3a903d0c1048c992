"""Jagged softmax attention, o_h = softmax(scale * q_h k_h^T) v_h per sequence and head: the forward with its log-sum-exp,
and the backward for few queries per sequence."""
