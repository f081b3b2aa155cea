"""SpecForge 0.2.0 in the race: its model, loss, optimizer, loader, collator and trainer, on samples from our shards.

Settings, as its configuration names them: attention_backend, compact_teacher, batch_size (sequences in a batch; as many
as fill our batches on average, if not given), max_grad_norm, dataloader_num_workers. It has no packing: a batch is padded to its longest
sequence. The order of the sequences is given.
"""

import os
import socket

import layouts
import torch
from jobs import Job
from specforge.algorithms.eagle3 import data as theirs
from specforge.algorithms.eagle3 import model as module
from specforge.algorithms.eagle3.providers import build_step
from specforge.core.loss import _compute_loss
from specforge.distributed import init_distributed
from specforge.export.to_hf import export_to_hf
from specforge.modeling.auto import AutoDraftModel
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import FeatureHandle, SampleRef
from specforge.runtime.control_plane import DataFlowController, NoOpMetadataStore
from specforge.training import Trainer

DEFAULTS = {
    "attention_backend": "flex_attention",
    "compact_teacher": False,
    "max_grad_norm": 0.5,
    "dataloader_num_workers": 4,
}
KEYS = ("input_ids", "aux_hidden_state", "hidden_state", "loss_mask")


class Shards:
    """Our sequences as its feature store: `get` is asked for a reference whose URI ends in the sequence's number."""

    def __init__(self, job: Job):
        self.job, self.sequences = job, job.open_sequences()

    def get(self, ref: SampleRef, *, device="cpu", names=None):
        i = int(ref.feature_store_uri.rpartition("/")[2])
        sample = layouts.specforge_sample(self.sequences, i, self.job.norm, self.job.config.rms_norm_eps)
        return sample, FeatureHandle(ref.sample_id, 0, "")

    def release(self, handle, *, reason="") -> None:
        pass


class ReferenceLoss:
    """Its own reference of the Triton loss, for a CPU."""

    @staticmethod
    def apply(logits, target_p, position_mask):
        return _compute_loss(logits, target_p, position_mask)


def start_distributed(cuda: bool) -> None:
    """Its trainer always wraps the model; alone, NO_SHARD (DistributedDataParallel) is the strategy its code advises."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"LOCAL_RANK": "0", "FSDP_SHARDING": "NO_SHARD", "SPECFORGE_DEVICE": "cuda" if cuda else "cpu"}
    if not torch.distributed.is_initialized():
        init_distributed()


def build(job: Job, backend: str):
    """(its composite model, its target head), bf16 on the device, as its own builder makes them from files."""
    c, folder = job.config, job.folder / "specforge"
    folder.mkdir(parents=True, exist_ok=True)
    config = layouts.layer_config(
        c, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=c.draft_vocab_size, tie_word_embeddings=False
    )
    config.save_pretrained(folder)
    with torch.device(job.device):
        draft = AutoDraftModel.from_config(config, attention_backend=backend, torch_dtype=torch.bfloat16)
        head = TargetHead(folder)
    tensors = job.start | {"embed_tokens.weight": job.embeddings, "t2d": job.t2d, "d2t": job.d2t}
    draft.load_state_dict(tensors)
    draft.vocab_mapping_loaded = True
    draft.freeze_embedding()
    model = module.OnlineEagle3Model(draft, length=job.settings.ttt_steps, attention_backend=backend)
    with torch.no_grad():
        head.fc.weight.copy_(job.head)
    head.freeze_weights()
    return model.to(job.device, torch.bfloat16), head.eval().to(job.device, torch.bfloat16)


def train(job: Job) -> None:
    """Train on the job's sequences and export to job.export; on a CPU with dense attention and its reference loss."""
    cuda = job.device.startswith("cuda")
    options = DEFAULTS | ({} if cuda else {"attention_backend": "sdpa", "dataloader_num_workers": 0}) | job.options
    if not cuda:
        module.LogSoftmaxLoss = ReferenceLoss
    start_distributed(cuda)
    order = [i for batch in job.plan for i in batch]
    size = options.get("batch_size") or max(1, round(len(order) / len(job.plan)))
    size = min(size, len(order))
    steps = len(order) // size
    refs = [
        SampleRef(
            sample_id=str(n),
            run_id="race",
            source_task_id=None,
            feature_store_uri=f"shard://{i}",
            feature_keys=dict(zip(KEYS, KEYS, strict=True)),
            feature_specs={},
            strategy="eagle3",
            metadata={"target_repr": "hidden_state", "ttt_length": job.settings.ttt_steps},
        )
        for n, i in enumerate(order[: steps * size])
    ]
    model, head = build(job, options["attention_backend"])
    batches = (order[n : n + size] for n in range(0, len(refs), size))
    trainer = Trainer(
        algorithm_name="eagle3",
        make_step_strategy=build_step,
        controller=DataFlowController("race", metadata_store=NoOpMetadataStore(), enable_sample_queue=False),
        store=Shards(job),
        ref_source={"refs": refs},
        model=model,
        target_head=head,
        optimizer_factory=lambda draft: BF16Optimizer(
            draft,
            lr=job.settings.learning_rate,
            max_grad_norm=options["max_grad_norm"],
            warmup_ratio=job.settings.warmup,
            total_steps=steps,
        ),
        run_id="race",
        output_dir=str(job.folder / "specforge"),
        batch_size=size,
        accumulation_steps=1,
        num_epochs=1,
        max_steps=None,
        save_interval=0,
        logger=lambda metrics, step: job.watch.step(next(batches)),
        log_interval=1,
        collate_fn=theirs.build_offline_collator(),
        strategy_kwargs={"compact_teacher": options["compact_teacher"]},
        per_sample_transform=theirs.build_offline_normalizer(job.settings.batch_tokens),
        durable_ack=False,
        dataloader_num_workers=options["dataloader_num_workers"],
    )
    with job.watch:
        trainer._controller.fit(trainer._loader)  # trainer.fit() would also write a checkpoint, inside the time
    if job.export:
        trainer.save_checkpoint()
        job.exported = job.folder / "specforge" / "exported"
        export_to_hf(
            str(job.folder / "specforge"),
            str(job.folder / "specforge" / "config.json"),
            str(job.exported),
            embedding_source=str(job.target),
        )
