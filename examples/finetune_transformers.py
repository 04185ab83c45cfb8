"""Fine-tuning with the Trainer of transformers and flatout's callback: a small BERT tells Python code from English.

    python examples/finetune_transformers.py
    python examples/finetune_transformers.py --steps 20 --batch-size 8

Needs transformers and accelerate. The model has random weights, so that nothing is downloaded.
"""

import argparse
import inspect
import tempfile
import tokenize
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset, random_split
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from flatout.integrations.transformers import FlatoutCallback


class Windows(Dataset):
    """Windows of bytes, from CPython's reference (label 0) and from the sources of its modules (label 1)."""

    def __init__(self, length):
        english = "\n".join(topics.values()).encode()
        code = "\n".join(inspect.getsource(module) for module in (argparse, inspect, tempfile, tokenize)).encode()
        self.samples = [(torch.tensor(list(text[i : i + length])), label)
                        for label, text in enumerate((english[: len(code)], code))
                        for i in range(0, len(code) - length, length)]  # fmt: skip

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        ids, label = self.samples[index]
        return {"input_ids": ids, "labels": label}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--steps", type=int, default=-1, help="number of updates, in place of --epochs")
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    set_seed(0)
    train, held_out = random_split(Windows(length=64), [0.9, 0.1])
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    config = BertConfig(vocab_size=256, initializer_range=0.1, **size)
    model = BertForSequenceClassification(config)  # or BertForSequenceClassification.from_pretrained(folder)

    callback = FlatoutCallback()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=args.epochs,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(
        model, arguments, train_dataset=train, eval_dataset=held_out, compute_metrics=accuracy, callbacks=[callback]
    )
    trainer.train()

    print(callback.report)
    result = trainer.evaluate()
    print(f"held-out loss {result['eval_loss']:.4f}, accuracy {result['eval_accuracy']:.1%}")


if __name__ == "__main__":
    main()
