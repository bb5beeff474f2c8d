"""Programs in the manner of each training library; all are correct unless `EXPECTED` names a code.

Each function is a training of its own, on each rank.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

EXPECTED = {
    "hf_trainer": ("LD008", "note", "transformers' Trainer, whose one seed gives all ranks the same dropout masks"),
    "hf_trainer_evaluates": ("", "", "transformers' Trainer that evaluates, keeps the best checkpoint and logs"),
    "hf_pads_sentences": ("", "", "transformers' Trainer with sentences of unequal lengths and accumulation"),
    "hf_splits_again": ("LD004", "", "transformers' Trainer with a data set that each rank has already split"),
    "accelerate_samplers": ("", "", "accelerate with split batches, accumulation, clipping and a schedule"),
    "accelerate_dispatches": ("", "", "accelerate that reads a stream on rank 0 and dispatches its batches"),
    "accelerate_without_prepare": ("LD002", "", "accelerate whose loader is not prepared"),
    "hf_sums_the_loss": ("LD014", "", "transformers' Trainer with a loss that is a sum"),
}


class Classifier(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 3))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits} if labels is not None else logits


class Rows(Dataset):
    def __init__(self, size, seed):
        self.x = torch.randn(size, 12, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index, :3].argmax()}


def tensors(size, seed):
    rows = Rows(size, seed)
    return TensorDataset(rows.x, rows.x[:, :3].argmax(1))


def _hf(**options):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        "hf",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    evaluated = Rows(32, 2) if "eval_strategy" in options else None
    return Trainer(Classifier(), arguments, train_dataset=Rows(64, 1), eval_dataset=evaluated)


def hf_trainer():
    _hf(save_strategy="no").train()
    dist.destroy_process_group()


def hf_trainer_evaluates():
    from transformers import EarlyStoppingCallback

    trainer = _hf(
        save_strategy="epoch",
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        logging_steps=2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=0.5,
    )
    trainer.add_callback(EarlyStoppingCallback(3))
    trainer.model.net[2].p = 0.0
    trainer.train()
    trainer.save_model("final")
    dist.destroy_process_group()


class Sentences(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        numbers = torch.Generator().manual_seed(index)
        return torch.randint(1, 40, (3 + int(torch.randint(10, (), generator=numbers)),), generator=numbers)


def pad(samples):
    tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": tokens.masked_fill(tokens == 0, -100)}


def hf_pads_sentences():
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2, **dropout)
    torch.manual_seed(3)
    arguments = TrainingArguments(
        "hf",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Sentences(), data_collator=pad).train()
    dist.destroy_process_group()


class Part(Rows):
    """Every n-th row, from the number of the rank."""

    def __init__(self, size, seed):
        super().__init__(size, seed)
        self.x = self.x[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else self.x


def hf_splits_again():
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(3)
    options = {"num_train_epochs": 2, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    # The arguments create the process group.
    arguments = TrainingArguments("hf", per_device_train_batch_size=4, **options)
    _ = arguments.device
    Trainer(Classifier(dropout=0.0), arguments, train_dataset=Part(96, 1)).train()
    dist.destroy_process_group()


def accelerate_samplers():
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
    )
    set_seed(11, device_specific=True)
    loader, held_out = DataLoader(tensors(96, 1), 8, shuffle=True), DataLoader(tensors(24, 2), 8)
    torch.manual_seed(3)
    model = Classifier(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    for _ in range(2):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model(x, y)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    schedule.step()
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        with torch.no_grad():
            for x, y in held_out:
                right.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
        accelerator.print("accuracy", torch.cat(right).float().mean().item())
        accelerator.wait_for_everyone()
        accelerator.save_state("accelerate-state", safe_serialization=False)
    accelerator.end_training()


class Stream(IterableDataset):
    def __iter__(self):
        yield from tensors(96, 1)


def accelerate_dispatches():
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    torch.manual_seed(3)
    model = Classifier(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(), 8))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(model(x, y)["loss"])
            optimizer.step()
    accelerator.end_training()


def accelerate_without_prepare():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    model = Classifier(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        for x, y in DataLoader(tensors(96, 1), 8, shuffle=True):
            optimizer.zero_grad()
            accelerator.backward(model(x, y)["loss"])
            optimizer.step()
    accelerator.end_training()


def hf_sums_the_loss():
    trainer = _hf(save_strategy="no")
    trainer.model.net[2].p = 0.0
    net = trainer.model
    net.forward = lambda x, labels: {"loss": F.cross_entropy(net.net(x), labels, reduction="sum")}
    trainer.train()
    dist.destroy_process_group()
