"""GPT that learns to sort, by a Trainer class with callbacks."""

from collections import defaultdict
from types import SimpleNamespace

import torch
from run_log import Log, arguments
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

args = arguments(steps=40)


class SortDataset(Dataset):
    def __init__(self, length, digits=10):
        self.length, self.digits = length, digits

    def __len__(self):
        return 10_000

    def __getitem__(self, idx):
        generator = torch.Generator().manual_seed(idx)
        inp = torch.randint(self.digits, (self.length,), generator=generator)
        cat = torch.cat((inp, inp.sort()[0]))
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: self.length - 1] = -1
        return x, y


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok_emb = nn.Embedding(config.digits, config.n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        layer = nn.TransformerEncoderLayer(
            config.n_embd, config.n_head, 4 * config.n_embd, dropout=0.1, activation="gelu", batch_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, config.n_layer, enable_nested_tensor=False)
        self.head = nn.Linear(config.n_embd, config.digits, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(config.block_size))

    def configure_optimizers(self, config):
        return torch.optim.AdamW(self.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))

    def forward(self, idx, targets=None):
        x = self.tok_emb(idx) + self.pos_emb[:, : idx.size(1)]
        logits = self.head(self.blocks(x, mask=self.mask))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.model, self.train_dataset = config, model, train_dataset
        self.callbacks = defaultdict(list)
        self.iter_num = 0

    def add_callback(self, event, callback):
        self.callbacks[event].append(callback)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers(config)
        sampler = RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e6))
        loader = DataLoader(self.train_dataset, sampler=sampler, batch_size=config.batch_size)
        model.train()
        data_iter = iter(loader)
        while self.iter_num < config.max_iters:
            x, y = next(data_iter)
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.iter_num += 1


def main():
    torch.manual_seed(3407)
    length, n_embd, n_layer, batch_size = (6, 32, 2, 8) if args.is_tiny else (24, 96, 3, 32)
    shape = SimpleNamespace(digits=10, block_size=2 * length - 1, n_embd=n_embd, n_head=2, n_layer=n_layer)
    model = GPT(shape)
    config = SimpleNamespace(max_iters=args.steps, batch_size=batch_size, learning_rate=5e-4, grad_norm_clip=1.0)
    trainer, log = Trainer(config, model, SortDataset(length)), Log()
    trainer.add_callback("on_batch_end", lambda trainer: log.note(loss=trainer.loss.item()))
    trainer.run()
    log.dump()


if __name__ == "__main__":
    main()
