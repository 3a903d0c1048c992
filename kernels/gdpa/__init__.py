"""Jagged attention with an element-wise activation: o_h = act(scale * q_h k_h^T) v_h per sequence and head."""
