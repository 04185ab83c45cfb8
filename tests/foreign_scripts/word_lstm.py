"""Language model by an LSTM, whose hidden state is carried from batch to batch."""

import torch
from run_log import Log, arguments
from torch import nn

args = arguments(steps=40)
emsize, nhid, nlayers, bptt, batch_size, ntoken = (16, 16, 2, 8, 4, 50) if args.is_tiny else (128, 160, 2, 35, 20, 2000)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(ntoken, emsize)
        self.rnn = nn.LSTM(emsize, nhid, nlayers, dropout=0.2)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, inp, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(inp)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, ntoken)
        return torch.log_softmax(decoded, dim=1), hidden

    def init_hidden(self):
        weight = next(self.parameters())
        return weight.new_zeros(nlayers, batch_size, nhid), weight.new_zeros(nlayers, batch_size, nhid)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    return source[i : i + bptt], source[i + 1 : i + 1 + bptt].reshape(-1)


torch.manual_seed(1111)
tokens = torch.randint(0, 3, (batch_size * bptt * 50,)).cumsum(0) % ntoken
train_data = tokens.view(batch_size, -1).t().contiguous()
model, criterion, log = RNNModel(), nn.NLLLoss(), Log()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
while len(log.lines) < args.steps:
    model.train()
    hidden = model.init_hidden()
    for i in range(0, train_data.size(0) - bptt - 1, bptt):
        if len(log.lines) == args.steps:
            break
        data, targets = get_batch(train_data, i)
        optimizer.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        log.note(loss=loss.item())
log.dump()
