"""What the bytes on disk mean; no decisions, no files.

`layout` knows every name, `record` the self-checksummed JSON that all small files share, `tree`
state without pickle, `part` the payload (safetensors), `seal` what vouches for a part, `attempt`
who trains and which parts there are. `tensors` alone imports torch.
"""
