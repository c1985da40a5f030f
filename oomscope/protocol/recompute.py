"""What both the run-time fix and its source patch keep of a block that is computed again in backward."""

#: Operators of `torch.ops.aten` that cost more to repeat than to keep: products, convolutions, attention.
KEPT_OPERATORS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
