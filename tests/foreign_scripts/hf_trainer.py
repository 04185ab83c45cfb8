"""Trainer of transformers on a small GPT-2, with gradient accumulation and a callback."""

import tempfile

import torch
from run_log import Log, arguments
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

args = arguments(steps=40)
width, layers, length, vocabulary, batch_size = (32, 2, 16, 64, 4) if args.is_tiny else (192, 4, 64, 1000, 8)


class Sentences(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        steps = torch.randint(0, 3, (count, length), generator=generator)
        self.tokens = steps.cumsum(1) % vocabulary

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Losses(TrainerCallback):
    def __init__(self):
        self.log = Log()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.log.note(loss=float(logs["loss"]))


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        training_args = TrainingArguments(
            folder, max_steps=args.steps, per_device_train_batch_size=batch_size, gradient_accumulation_steps=2,
            learning_rate=1e-3, logging_steps=1, logging_strategy="steps", save_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(GPT2LMHeadModel(config), training_args, train_dataset=Sentences(256), callbacks=[losses])
        trainer.train()
    losses.log.dump()


if __name__ == "__main__":
    main()
