"""The toolkit of quantizers: weight formats of whole numbers, which weights to take, and what calibration has seen.

`options` needs no torch; `integers` and `calibration` do.
"""
