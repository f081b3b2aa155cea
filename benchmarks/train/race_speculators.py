"""speculators 0.9.0 in the race: its model, loss, optimizer, packing collator and trainer, on samples from our shards.

Settings, as its command line names them: optimizer (muon, its default, or adamw), ttt_step_loss_decay, loss_fn,
loss_implementation (fused, or eager: torch 2.11 cannot compile the fused one), num_workers. Batches are packed and
document masks are its own; which sequences share a batch is given.
"""

import functools
from pathlib import Path

import layouts
import torch
from jobs import Job
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train import trainer as module
from speculators.train.data import BaseDataset, CollateFn
from speculators.train.dataloader import _worker_init_fn
from torch.utils.data import DataLoader

DEFAULTS = {
    "optimizer": "muon",
    "loss_fn": "kl_div",
    "loss_implementation": "fused",
    "ttt_step_loss_decay": 1.0,
    "num_workers": 4,
}


class Shards(BaseDataset):
    """Our sequences as its dataset; each worker process opens them for itself."""

    def __init__(self, open_sequences, max_len: int):
        self.open_sequences = open_sequences
        super().__init__(max_len)

    def _compute_approx_lengths(self) -> list[int]:
        return []  # only its own sampler asks

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "sequences"}

    @functools.cached_property
    def sequences(self):
        return self.open_sequences()

    def _get_raw_data(self, index: int) -> dict:
        return layouts.speculators_sample(self.sequences, index)


def build(job: Job, cuda: bool) -> Eagle3DraftModel:
    c = job.config
    layer = layouts.layer_config(c)
    layer._attn_implementation = "simple_flex_attention" if cuda else "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=c.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=c.layers,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=job.settings.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    with torch.device(job.device):
        model = Eagle3DraftModel(config)
    model.load_vocab_mappings(job.t2d, job.d2t)
    # What its load_verifier_weights reads from the target's folder.
    frozen = {
        "embed_tokens.weight": job.embeddings,
        "verifier_lm_head.weight": job.head[job.t2d],
        "verifier_norm.weight": job.norm,
    }
    tensors = {layouts.to_speculators(name): tensor for name, tensor in job.start.items()}
    missing, unexpected = model.load_state_dict(tensors | frozen, strict=False)
    if unexpected or set(missing) - {"t2d", "d2t"}:
        raise RuntimeError(f"speculators has other tensors: missing {missing}, unexpected {unexpected}")
    return model


def train(job: Job) -> None:
    """Train on the job's batches and export to job.export; on a CPU with eager attention and loss."""
    cuda = job.device.startswith("cuda")
    options = DEFAULTS | ({} if cuda else {"loss_implementation": "eager", "num_workers": 0}) | job.options
    if not cuda:
        module.get_local_rank = lambda: "cpu"
        torch.accelerator.synchronize = lambda *_: None
    model = build(job, cuda)
    dataset = Shards(job.open_sequences, job.settings.batch_tokens)
    workers = options["num_workers"]
    loader = DataLoader(
        dataset,
        batch_sampler=job.plan,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=cuda,
        collate_fn=CollateFn(
            job.settings.batch_tokens, job.config.hidden_size, len(job.config.layers), preprocess=shift_batch
        ),
        persistent_workers=bool(workers),
        multiprocessing_context="spawn" if workers else None,
        worker_init_fn=_worker_init_fn if workers else None,
    )
    call, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn=options["loss_fn"],
        loss_implementation=options["loss_implementation"],
        ttt_steps=job.settings.ttt_steps,
        ttt_step_loss_decay=options["ttt_step_loss_decay"],
    )
    config = module.TrainerConfig(
        lr=job.settings.learning_rate,
        muon_lr=job.settings.learning_rate,
        num_epochs=1,
        save_path=str(job.folder / "speculators"),
        train_call_kwargs=call,
        optimizer=options["optimizer"],
        scheduler_type="cosine",
        scheduler_warmup_ratio=job.settings.warmup,
        log_freq=1 << 30,  # with less it waits for the device at every step that it logs
    )
    trainer = module.Trainer(model, config, loader)
    if not cuda:
        trainer.device_type = "cpu"
    batches = iter(job.plan)
    with job.watch:
        trainer.train_epoch(0, step_callback=lambda: job.watch.step(next(batches)))
    if job.export:
        trainer.checkpointer.save_checkpoint(trainer.model, trainer.optimizers, 0)
        job.exported = Path(config.save_path) / "0"
