"""The paged KV cache: its layout and scales (the ABI), writes, copies, checks of block ids."""
