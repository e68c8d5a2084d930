"""Words of English that tell nothing by themselves, for rag/compress.py: a sentence of these alone, without a fact, is left out.

In the form that rag/words.py gives. The list errs on the short side: a word that is missing here keeps its sentence, and what may
be an answer (open, new, year) is not here."""

from zse.rag.words import words_of

# Grammar: articles, pronouns, prepositions, auxiliaries, adverbs.
_GRAMMAR = """a about above across actually after again ago ahead all almost along already also although always am among an and
another any anybody anyone anything anyway anywhere apart are around as aside at away back be became because become
been before behind being below beside between beyond both but by came can certainly clearly come could course
definitely despite did do does doing done down during each either else enough especially essentially even ever every
everybody everyone everything everywhere exactly fairly far few finally first firstly following for forth fortunately
from fully further furthermore generally gladly go goes going gone had has have having he hence her here herself him
himself his how i if in indeed inside into is it its itself just last lastly later latter least less let like likely
likewise many may maybe me meanwhile might mine more moreover most mostly much my myself namely naturally near nearly
necessarily next now obviously of off often on once one oneself onto or other otherwise our ourselves out outside over
overall own per perhaps please plus possibly probably quite rather readily really regarding same second secondly
seldom several shall she should similarly simply since so some somebody someone something sometime somewhat somewhere
soon still such surely than that the their them themself then there thereby therefore these they this those though
through throughout thus thus to together too toward truly twice typically under until unto up upon us use used using
usual usually various very via was was we well were what whatever when whenever where whereas wherever whether which
while who whoever whole whom whose why widely will with within would yet you your yourselves"""
# Talk: what introductions, praise and menus are made of.
_TALK = """able add advantage agree aim amazing appreciate appreciated aspect await aware beautiful begin beginning believe
benefit best better bit bring care case change check choice choose classic click close closer consider considered
contact content convenient cookie copyright course cover day deal decide delight delightful design detail discover
easily easy effort enjoy enjoyable ensure entire everyday excellent exciting expect experience explore fact family
famous favorite favourite feature feel fellow find fine finest footer friend friendly fun future general get give
given glance good got great guide happen happy have hear heart help helpful highest highly home hope huge idea ideal
imagine important impressive improve incredible information interest interested interesting introduction join journey
keep kind know known leading learn life little live long look lot lovely main make making matter mean meet memorable
mention menu mind moment navigation need needless nice note notice number occasion offer offering one online order
page part people perfect perfectly person phrase place pleasant pleased pleasure plenty point popular possible
practice previous proud provide purpose put quality question read reader reason recommend recommended regard regarded
remark remarkable remember return right say saying scroll search section see seen set share shop show sign simple site
sitemap skip special start stay step stop story subscribe support sure take taken talk tell term thank thing think
thought time tip today together tomorrow top topic touch truly try turn type understand unforgettable unique useful
user value variety view visit visitor wait walk want way website welcome went widely wish wonder wonderful word work
world worth worthwhile"""
GENERIC = frozenset(words_of(_GRAMMAR)) | frozenset(words_of(_TALK))
