"""Models of the timm package, small where the package lets one, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.zoo_packages.made import Made, images, stirred

WINDOWED: Mapping[str, Any] = {
    "img_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
}
PLAIN: Mapping[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
}
TNT: Mapping[str, Any] = {
    "img_size": 32,
    "patch_size": 16,
    "embed_dim": 32,
    "depth": 2,
    "inner_dim": 8,
    "num_heads_outer": 4,
    "num_heads_inner": 2,
}


@dataclass(frozen=True)
class Timm:
    """A timm architecture.

    Attributes:
        name: as `timm.create_model` takes it.
        sites: softmax attentions in it.
        image: height and width of the example.
        options: what is made smaller, or switched on.
        fused: whether F.scaled_dot_product_attention is used where the model has a choice.
    """

    name: str
    sites: int
    image: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = True

    def build(self) -> Made:
        import timm
        from timm.layers import set_fused_attn

        before = timm.layers.use_fused_attn()
        set_fused_attn(self.fused)
        try:
            model = timm.create_model(self.name, num_classes=5, **self.options)
        finally:
            set_fused_attn(before)
        return stirred(model), images(self.image)


def plain(name: str, *, sites: int = 2, fused: bool = True, **options: Any) -> Timm:
    """A transformer of patches: two layers of width 32 with four heads, on 32 pixels."""
    return Timm(name, sites, 32, {**PLAIN, **options}, fused)


def windowed(name: str, *, fused: bool = True, **options: Any) -> Timm:
    return Timm(name, 4, 32, {**WINDOWED, **options}, fused)


TIMM: dict[str, Timm] = {
    "vit": plain("vit_tiny_patch16_224"),
    "vit-by-hand": plain("vit_tiny_patch16_224", fused=False),
    "vit-qk-norm": plain("vit_tiny_patch16_224", qk_norm=True),
    "vit-registers": plain("vit_tiny_patch16_224", reg_tokens=2, init_values=0.1),
    "vit-pooled-by-attention": plain("vit_base_patch16_siglip_224", sites=3),
    "vit-relative-positions": plain("vit_relpos_small_patch16_224"),
    "vit-relative-positions-by-hand": plain("vit_relpos_small_patch16_224", fused=False),
    "vit-parallel": plain("vit_small_patch16_18x2_224", sites=4),
    "deit": plain("deit_tiny_distilled_patch16_224"),
    "deit3": plain("deit3_small_patch16_224"),
    "beit": plain("beit_base_patch16_224"),
    "beit-by-hand": plain("beit_base_patch16_224", fused=False),
    "beit-v2": plain("beitv2_base_patch16_224"),
    "eva02": plain("eva02_tiny_patch14_224"),
    "eva02-by-hand": plain("eva02_tiny_patch14_224", fused=False),
    "dinov3": plain("vit_small_patch16_dinov3"),
    "naflex": plain("naflexvit_base_patch16_gap", img_size=None),
    "aimv2": plain("aimv2_large_patch14_224"),
    "sam": plain("samvit_base_patch16", window_size=3, global_attn_indexes=(1,)),
    "swin": windowed("swin_tiny_patch4_window7_224", window_size=4),
    "swin-by-hand": windowed("swin_tiny_patch4_window7_224", window_size=4, fused=False),
    "swin-v2": windowed("swinv2_tiny_window8_256", window_size=4),
    "swin-v2-cr": windowed("swinv2_cr_tiny_224", window_size=4),
    "cait": plain("cait_xxs24_224", sites=4),
    "crossvit": Timm("crossvit_tiny_240", 21, 240),
    "tnt": Timm("tnt_s_patch16_224", 4, 32, TNT),
    "convit": plain("convit_tiny", sites=3, local_up_to_layer=1),
    "pit": Timm("pit_ti_224", 12, 224),
    "xcit": plain("xcit_nano_12_p16_224", sites=4),
    "pvt-v2": Timm("pvt_v2_b0", 8),
    "pvt-v2-linear": Timm("pvt_v2_b2_li", 16),
    "twins-pcpvt": Timm("twins_pcpvt_small", 16, 64, {"img_size": 64}),
    "twins-svt": Timm("twins_svt_small", 18, 224),
    "mobilevit": Timm("mobilevit_xxs", 9),
    "mobilevit-v2": Timm("mobilevitv2_050", 9),
    "coatnet": Timm("coatnet_0_rw_224", 9, 64, {"img_size": 64}),
    "coatnet-rmlp": Timm("coatnet_rmlp_nano_rw_224", 9, 64, {"img_size": 64}),
    "maxvit": Timm("maxvit_pico_rw_256", 22, 64, {"img_size": 64}),
    "maxvit-tf": Timm("maxvit_tiny_tf_224", 22, 64, {"img_size": 64}),
    "levit": Timm("levit_128s", 11, 224),
    "efficientformer": Timm("efficientformer_l1", 1, 224),
    "efficientformer-v2": Timm("efficientformerv2_s0", 5, 224),
    "efficientvit-mit": Timm("efficientvit_b0", 0),
    "efficientvit-msra": Timm("efficientvit_m0", 24, 224),
    "edgenext": Timm("edgenext_xx_small", 3),
    "fastvit": Timm("fastvit_sa12", 2),
    "nextvit": Timm("nextvit_small", 4),
    "coat-lite": Timm("coat_lite_tiny", 8, 64, {"img_size": 64}),
    "davit": Timm("davit_tiny", 12, 224),
    "gcvit": Timm("gcvit_xxtiny", 12, 224),
    "mvit-v2": Timm("mvitv2_tiny", 10, 64, {"img_size": 64}),
    "nest": Timm("nest_tiny", 12, 224),
    "hiera": Timm("hiera_tiny_224", 12, 224),
    "hieradet": Timm("sam2_hiera_tiny", 12, 128),
    "tiny-vit": Timm("tiny_vit_5m_224", 10, 224),
    "visformer": Timm("visformer_tiny", 8, 224),
    "volo": Timm("volo_d1_224", 20, 64, {"img_size": 64}),
    "botnet": Timm("botnet26t_256", 3, 256),
    "halonet": Timm("halonet26t", 3, 256),
    "lambda-resnet": Timm("lambda_resnet26t", 3, 128),
    "resnet-clip": Timm("resnet50_clip", 1, 224),
    "mobilenet-v4-hybrid": Timm("mobilenetv4_hybrid_medium", 8, 128),
    "shvit": Timm("shvit_s1", 9, 128),
    "swiftformer": Timm("swiftformer_xs", 0, 64),
    "vitamin": Timm("vitamin_small_224", 14, 64, {"img_size": 64}),
    "poolformer": Timm("poolformer_s12", 0),
    "convnext": Timm("convnext_atto", 0),
    "focalnet": Timm("focalnet_tiny_srf", 0),
    "seresnet": Timm("seresnet18", 0),
    "ecanet": Timm("eca_resnet33ts", 0),
    "mixer": Timm("mixer_s16_224", 0, 32, {"img_size": 32}),
}
