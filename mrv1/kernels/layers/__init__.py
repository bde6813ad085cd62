"""The layers of a decoder: linear, norm, rope, activation, embedding."""
