"""Jagged softmax attention, forward: o_h = softmax(scale * q_h k_h^T) v_h and its log-sum-exp, per sequence and head."""
