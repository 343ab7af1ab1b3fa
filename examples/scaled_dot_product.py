"""softmax(Q K^T / sqrt(d_k)) V for four tokens of eight features, next to PyTorch's own."""

import torch
import torch.nn.functional as F

from attn_export.models.attention.scaled_dot_product import attention_weights

torch.manual_seed(0)
q, k, v = torch.randn(3, 4, 8).unbind(0)

weights = attention_weights(q, k)  # (4, 4)
output = weights @ v  # (4, 8)
fused = F.scaled_dot_product_attention(q, k, v)

print("weights of token 0:", [round(w, 3) for w in weights[0].tolist()])
print("their sum:", round(weights[0].sum().item(), 6))
print("largest difference from PyTorch:", (output - fused).abs().max().item())
